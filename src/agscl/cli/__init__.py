"""The command `agscl`: one file a command, the options they share, and what the terminal shows."""
