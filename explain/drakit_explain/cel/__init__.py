"""
Selectors evaluated: by Kubernetes' own compiler in a helper program, or by a Python library.

:mod:`.helper` asks the program of ``operator/cel``.

It must not know slices, claims, or explanations.
"""
