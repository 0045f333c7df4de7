set -u
nvidia-smi --query-gpu=name,clocks.sm,power.draw,temperature.gpu --format=csv
( timeout 300 python -m tests.gpu.test_fuzz --n 1000 --seed 20261130 --workers 12 > $OUT/fuzz.log 2>&1; echo fuzz rc $? >> $OUT/fuzz.log ) &
( timeout 280 python -m pytest -q -p no:cacheprovider tests/gpu/test_layouts.py tests/gpu/test_fixed_shift.py --durations=5 > $OUT/py1.log 2>&1; echo rc $? >> $OUT/py1.log ) &
( timeout 280 python -m pytest -q -p no:cacheprovider tests/gpu/test_smoke.py tests/gpu/test_repeat.py --durations=5 > $OUT/py2.log 2>&1; echo rc $? >> $OUT/py2.log ) &
wait
tail -n 4 $OUT/fuzz.log; tail -n 12 $OUT/py1.log; tail -n 12 $OUT/py2.log
P="dtype=torch.bfloat16, head_dim=128, head_dim_v=128"
rung() { n=$1; shift; ( timeout 60 python -m tests.gpu.test_fuzz --sequences --workers 1 --seed 5 --problem "Problem($*)" > $OUT/rung$n.log 2>&1; echo "rung $n rc $? : $*" >> $OUT/rung$n.log ) & }
rung 1 "$P, seqlen_q=300, seqlen_k=300, used_q=(200,)"
rung 2 "$P, seqlen_q=300, seqlen_k=300, used_k=(200,)"
rung 3 "$P, lengths_q=(200, 130), seqlen_k=300, heads_kv=2"
rung 4 "$P, seqlen_q=300, lengths_k=(200, 130), heads_kv=2"
rung 5 "$P, lengths_q=(200, 1, 0, 330), lengths_k=(100, 700, 5, 330), causal=True, heads_kv=4, around=(3, 200)"
rung 6 "$P, seqlen_q=1990, seqlen_k=1990, causal=True, softmax_scale=0.7, layouts=('contiguous', 'padded', 'unaligned'), value_scale=0.1, softcap=5.0, lengths_q=(1407,), used_k=(1990,)"
rung 7 "dtype=torch.bfloat16, head_dim=64, head_dim_v=64, seqlen_q=2, seqlen_k=3000, causal=True, heads_kv=4, ratio=8, used_k=(3000, 1, 0, 2999, 700, 64, 65, 1024)"
wait
for n in 1 2 3 4 5 6 7; do tail -n 3 $OUT/rung$n.log | cut -c1-400; done
timeout 200 python -m bench.run --budget-s 0.7 --out $OUT/run.json > $OUT/run.log 2>&1
tail -n 45 $OUT/run.log
tar -C $OUT -czf $OUT/logs.tgz --exclude=logs.tgz . ; rm -f $OUT/rung*.log
