"""Files, processes and arithmetic: nothing here knows of continual learning."""
