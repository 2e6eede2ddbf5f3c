"""What methods share: the life cycle, optimizer hooks, penalties, proximal steps, importances, BatchNorm."""
