"""Drop-ins: the calls that people already make, with one import changed and without the limits of what stood behind them."""
