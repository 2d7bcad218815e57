"""
Drivers that each break one rule of the contract, and one driver that breaks none.

The driver in :mod:`.tidy` follows all rules. The others differ from it by one fault, and are
grouped by its subject: :mod:`.publishing`, :mod:`.preparing`, :mod:`.unpreparing`, :mod:`.sharing`
and :mod:`.vanishing`. :mod:`.backend` is a backend as a separate process.
"""
