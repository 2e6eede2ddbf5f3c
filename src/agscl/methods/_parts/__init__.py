"""What methods share: the life cycle, optimizer hooks, penalties, frozen parts, views of tasks, BatchNorm."""
