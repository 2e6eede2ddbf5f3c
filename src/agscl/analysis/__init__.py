"""What a run shows: metrics, memory, and which nodes matter."""
