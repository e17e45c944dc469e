"""Workers from outside: who starts them, watches them, replaces them, and tells them of each other."""
