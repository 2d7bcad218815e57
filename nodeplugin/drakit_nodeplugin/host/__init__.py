"""The drivers that the process hosts, and the maintenance of their claims."""
