"""What goes first, what is worth keeping, what is worth loading. The pool decides what may go."""
