"""A real cluster behind one small interface (:mod:`.api`), from one of two providers."""
