"""`/v1/responses`: a translation to one chat turn and back, and the store of responses that others go on from."""
