from .command import Command
COMMAND=Command("demo","x",lambda p:None,lambda a:0)
