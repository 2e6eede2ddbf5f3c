"""What AGS-CL alone is made of: proximal operators, fresh weights, the budget, what it checks and certifies."""
