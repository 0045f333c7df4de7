set -u
P="dtype=torch.bfloat16, head_dim=128, head_dim_v=128"
rung() { n=$1; shift; ( timeout 70 python -m tests.gpu.test_fuzz --workers 1 --seed 5 --problem "Problem($*)" > $OUT/rung$n.log 2>&1; echo "rung $n rc $? : $*" >> $OUT/rung$n.log ) & }
rung 1 "$P, seqlen_q=300, seqlen_k=300, used_q=(200,)"
rung 2 "$P, seqlen_q=300, seqlen_k=300, used_k=(200,)"
rung 3 "$P, lengths_q=(200, 130), seqlen_k=300, heads_kv=2, batch=2"
rung 4 "$P, seqlen_q=300, lengths_k=(200, 130), heads_kv=2, batch=2"
rung 5 "$P, lengths_q=(200, 1, 0, 330), lengths_k=(100, 700, 5, 330), causal=True, heads_kv=4, around=(3, 200)"
rung 6 "$P, seqlen_q=1990, seqlen_k=1990, causal=True, softmax_scale=0.7, layouts=('contiguous', 'padded', 'unaligned'), value_scale=0.1, softcap=5.0, lengths_q=(1407,), used_k=(1990,)"
rung 7 "dtype=torch.bfloat16, head_dim=64, head_dim_v=64, seqlen_q=2, seqlen_k=3000, causal=True, heads_kv=4, ratio=8, used_k=(3000, 1, 0, 2999, 700, 64, 65, 1024)"
wait
for n in 1 2 3 4 5 6 7; do tail -n 4 $OUT/rung$n.log | cut -c1-500; done
rm -f $OUT/rung*
( timeout 260 python -m tests.gpu.test_fuzz --n 700 --seed 20261201 --workers 12 > $OUT/fuzz.log 2>&1; echo fuzz rc $? >> $OUT/fuzz.log ) &
( timeout 200 python -m pytest -q -p no:cacheprovider tests/gpu/test_smoke.py tests/gpu/test_repeat.py tests/gpu/test_layouts.py -k "sequence or packed or in_use or used or varlen or rows or keys or lengths or packs" --durations=5 > $OUT/py2.log 2>&1; echo rc $? >> $OUT/py2.log ) &
wait
tail -n 30 $OUT/fuzz.log | cut -c1-700; tail -n 40 $OUT/py2.log | cut -c1-300
