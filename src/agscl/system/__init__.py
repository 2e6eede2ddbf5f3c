"""Files, processes and arithmetic settings: nothing here is about continual learning."""
