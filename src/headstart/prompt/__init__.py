"""What in a prompt costs TTFT: where prompts leave each other and why, and what can be cut from them.

Reads requests and rendered prompts; knows no tokenizer, no template, no engine and no HTTP. Never imports torch.
"""
