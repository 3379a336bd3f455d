"""kvferry inside serving engines."""
