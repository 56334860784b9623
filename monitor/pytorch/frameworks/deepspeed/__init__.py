"""DeepSpeed: ZeRO 0 to 3, in full and reduced precision."""
