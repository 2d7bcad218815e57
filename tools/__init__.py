"""What writes and checks files of this repository; nothing of it is installed with drakit."""
