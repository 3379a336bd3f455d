"""The one thin layer between kvferry and a GPU: its driver, through ctypes. Nothing is compiled."""
