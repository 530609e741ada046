"""Pre-training of BERT on text, proteins and molecules."""
