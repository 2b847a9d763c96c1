"""What a call goes through before anything is chosen: its checks, its way to canonical axes, its parts on several devices."""
