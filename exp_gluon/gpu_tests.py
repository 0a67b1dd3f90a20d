"""tests/gpu/test_staged_cuda.py, in many processes at once."""
import os, subprocess, sys, time
GROUPS = ["test_sizes and 1-1", "test_sizes and not 1-1", "test_conditions and options0", "test_conditions and options1", "test_conditions and options2", "test_conditions and options3", "test_conditions and options4",
          "documents", "strides", "guess", "nan or repeats", "gradients", "chosen"]
if len(sys.argv) > 1: GROUPS = sys.argv[1:]
t0 = time.time()
ps = [(g, subprocess.Popen([sys.executable, "-m", "pytest", "-q", "-x", "-c", "/dev/null", "--rootdir=.", "--noconftest", "-p", "no:cacheprovider", "tests/gpu/test_staged_cuda.py", "-k", g],
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)) for g in GROUPS]
for g, p in ps:
    try: out, _ = p.communicate(timeout=max(1, 28 - (time.time() - t0)))
    except subprocess.TimeoutExpired:
        p.kill(); out, _ = p.communicate(); out += "\nTIMEOUT"
    tail = out.strip().splitlines()
    print(f"[{g}] {tail[-1] if tail else ''}")
    if p.returncode: print("\n".join(tail[-25:]))
print("tests", round(time.time() - t0, 1), "s", flush=True)
