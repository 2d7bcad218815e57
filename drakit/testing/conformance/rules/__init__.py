"""
The rules of the contract, a module a subject; :func:`drakit.testing.conformance.rule.rules` finds
them.

They must not know how the kit is made: what it has in public is what they use.
"""
