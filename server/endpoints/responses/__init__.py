"""`/v1/responses`: translation to one chat turn and back, and the store of responses that later requests continue."""
