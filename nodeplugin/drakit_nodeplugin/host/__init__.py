"""One hosted driver, all of them, and the maintenance of their claims."""
