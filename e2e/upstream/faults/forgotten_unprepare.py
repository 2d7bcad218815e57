"""The node plugin responds to an unprepare without calling the driver."""

from drakit_nodeplugin.__main__ import main
from drakit_nodeplugin.claims.unprepare import Unpreparing

Unpreparing._needs_driver = lambda self, claim: False  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
