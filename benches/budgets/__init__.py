"""Instructions per packet of whole paths and of their functions, by callgrind, and the budgets that they must keep."""
