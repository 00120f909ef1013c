"""The units that a plan is made of (`units`): their links, their memory, their rates, and which are used."""
