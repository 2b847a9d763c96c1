"""The sizes of a small diffusion module of Boltz."""

SMALL = {
    "token_s": 8,
    "atom_s": 16,
    "dim_fourier": 8,
    "atom_encoder_depth": 1,
    "atom_decoder_depth": 1,
    "token_transformer_depth": 1,
    "token_transformer_heads": 4,
}
