def ws(BN=128, STAGES=2, PING=False, GUESS=True, QREG=False, LANES=True, OVERLAP=True, CONSUMERS=2, REGS=240, maxnreg=168):
    return dict(kernel="specialised", rows=64, BN=BN, warps=4, maxnreg=maxnreg, tile=64 * CONSUMERS,
                consts=dict(CONSUMERS=CONSUMERS, STAGES=STAGES, PING=PING, GUESS=GUESS, QREG=QREG, LANES=LANES, OVERLAP=OVERLAP, REGS=REGS))

def plain(rows=128, warps=8, BN=128, STAGES=2, GUESS=True, QREG=False, LANES=True, OVERLAP=True):
    return dict(kernel="together", rows=rows, BN=BN, warps=warps, tile=rows,
                consts=dict(STAGES=STAGES, GUESS=GUESS, QREG=QREG, LANES=LANES, OVERLAP=OVERLAP))

VARIANTS = {
    "ws128": ws(),
    "ws128ping": ws(PING=True),
    "ws128pingonly": ws(PING=True, OVERLAP=False),
    "ws128seq": ws(OVERLAP=False),
    "ws128q": ws(QREG=True),
    "ws128online": ws(GUESS=False, LANES=False),
    "ws128onlineping": ws(GUESS=False, LANES=False, PING=True),
    "ws128nolanes": ws(LANES=False),
    "ws64s4": ws(BN=64, STAGES=4),
    "ws64s4ping": ws(BN=64, STAGES=4, PING=True),
    "ws64s4q": ws(BN=64, STAGES=4, QREG=True),
    "ws64c3": ws(BN=64, STAGES=3, CONSUMERS=3, REGS=160, maxnreg=128),
    "a128x128": plain(),
    "a128x64": plain(BN=64, STAGES=3),
    "a64x64": plain(rows=64, warps=4, BN=64, STAGES=2),
    "a64x64q": plain(rows=64, warps=4, BN=64, STAGES=2, QREG=True),
    "a64x64s3q": plain(rows=64, warps=4, BN=64, STAGES=3, QREG=True),
}
