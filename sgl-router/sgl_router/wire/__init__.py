"""HTTP/1.1 on the wire: strict message heads and the framing of bodies."""
