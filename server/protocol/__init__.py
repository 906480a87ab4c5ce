"""Request schemas, one file per endpoint on a strict base; reading of bodies; writing of long answers."""
