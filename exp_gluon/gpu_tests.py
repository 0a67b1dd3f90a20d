"""The cases of tests/staged.py on the GPU, in many processes at once."""
import subprocess, sys, time
WAYS = 11
if len(sys.argv) > 1:
    import torch, traceback, monoidreduce as mr
    from monoidreduce.engine.triton import use_plan, launch
    from tests.staged import BY_TURNS, CASES, check, check_nan
    kernels, real = [], launch.execute
    launch.execute = lambda call: kernels.append(call.kernel.staged) or real(call)
    for case in [*CASES, None][int(sys.argv[1])::WAYS]:
        try:
            with use_plan(BY_TURNS), mr.use(engine="triton"):
                check(case, "cuda") if case else check_nan("cuda")
            print("ok  ", case, kernels, flush=True)
        except BaseException: print("FAIL", case, kernels, traceback.format_exc()[-900:], flush=True)
    sys.exit()
t0 = time.time()
ps = [subprocess.Popen([sys.executable, __file__, str(k)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for k in range(WAYS)]
ps += [subprocess.Popen([sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir=.", "--noconftest", "-p", "no:cacheprovider", "tests/gpu/test_staged_cuda.py", "-k", k], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for k in ("repeats", "gradients", "chosen")]
for p in ps:
    try: out, _ = p.communicate(timeout=max(1, 28 - (time.time() - t0)))
    except subprocess.TimeoutExpired: p.kill(); out, _ = p.communicate(); out += "\nTIMEOUT"
    print(out.strip()[-1500:])
print("tests", round(time.time() - t0, 1), "s", flush=True)
