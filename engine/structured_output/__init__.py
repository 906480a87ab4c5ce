"""Grammars: compiled where they can do no harm, matched token by token, handed out as masks."""
