"""Programs that write and check files of this repository. They are not installed with drakit."""
