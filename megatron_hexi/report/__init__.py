"""Tables, pictures and plain values of plans, predictions and runs, one kind of output a file."""
