"""Training and sampling with torch: plain arguments in, numbers out; no HTTP, no SQL, no ids of users."""
