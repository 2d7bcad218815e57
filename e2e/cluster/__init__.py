"""A real cluster behind one small interface (:mod:`.api`), with two providers."""
