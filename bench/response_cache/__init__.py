"""The exact response cache of a server: time of a hit, and hits against fresh answers."""
