"""The hosted drivers of the process, and the maintenance of their claims."""
