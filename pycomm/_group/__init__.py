"""How torch makes and asks a group of pycomm's."""
