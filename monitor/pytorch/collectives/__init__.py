"""Records inputs and outputs of communication operators, whether Python or C++ issues them."""
