"""What a run shows: metrics, and which nodes matter."""
