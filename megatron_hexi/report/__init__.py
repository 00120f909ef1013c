"""What people look at: tables, pictures. One kind of output a file, all of them fed by `holdings`."""
