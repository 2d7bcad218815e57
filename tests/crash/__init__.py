"""
The crash matrix: the node plugin is killed at every step that it makes, and loses or leaks nothing.

    make crash-matrix
    python -m tests.crash --list --scenario prepare
    python -m tests.crash --scenario prepare --point "rename cdi/" [--variant nobody]

How it works
    1. A scenario (:mod:`.scenarios`) begins with a node's directories and does one thing: a
       prepare, an unprepare, a start after a first kill, after a reboot, after damage, ...
    2. It runs once to its end. :mod:`.steps` observes, from outside the code, each file that
       is written, renamed or removed, each transaction, driver call and reply, and labels it.
    3. For each label it runs again on a copy of the same directories, and the process kills
       itself (SIGKILL) there. A label that was found and is not reached fails. The last point of a
       scenario is its end: the reply is received, and then the process is killed.
    4. The state of the node at that moment must be consistent: each mark of the hardware and each
       CDI file has a row, and claims in use are still prepared.
    5. The plugin is started again, with the pod UID that it had or a new one, and then
       the kubelet calls again until it succeeds (variant ``prepare``); or the
       pod was deleted, and the kubelet only unprepares (``unprepare``); or there is no call, and
       the plugin must repair the state alone (``nobody``). After each call, rows, CDI files and
       marks are exactly those of a small model. At the end nothing is held, and another pod gets
       all devices.

Real and simulated parts
    The plugin is the whole daemon with configuration file, flags, sockets, gRPC, HTTP and SQLite;
    :mod:`.forkserver` only saves its imports. The API server and the kubelet are the fakes of
    `tests/fakes`, the hardware is a directory (:mod:`.drivers`). A kill is not a power cut: what
    was written is there afterwards, synced or not. SQLite's own writes within a transaction are not
    steps; a transaction exists after its commit and not before.

Output
    One line per scenario; for each failure its problem, and the command to repeat it; at the end
    ``points=N survived=N leaks=0``, and exit code 0 only if there was no failure of any kind.
"""
