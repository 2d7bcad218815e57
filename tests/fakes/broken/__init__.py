"""
Drivers that break one rule of the contract each, and the one that breaks none.

:mod:`.tidy` is the driver that all of them are but for one fault; they stand by the subject of
their fault in :mod:`.publishing`, :mod:`.preparing`, :mod:`.unpreparing` and :mod:`.sharing`.
"""
