"""Workers from outside: who starts them, watches them and ends them."""
