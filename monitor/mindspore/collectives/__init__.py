"""Communication operators: what goes into them and what comes out, whichever way they are issued."""
