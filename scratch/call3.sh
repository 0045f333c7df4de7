set -u
X=""
timeout 75 python -m bench.tune --cells d128-full-s1024-b16-h16,d128-causal-s512-b32-h16,d256-full-s1024-b16-h8 --only cluster --workers 14 --out $OUT/tune0.json > $OUT/tune0.log 2>&1 || X="--without cluster"
tail -n 30 $OUT/tune0.log | cut -c1-170
timeout 230 python -m bench.tune $X --workers 15 --seconds 0.2 --out $OUT/tune.json > $OUT/tune.log 2>&1
grep -v "^$" $OUT/tune.log | cut -c1-135 | tail -n 190
timeout 200 python -m bench.features --workers 14 --limit-s 150 --out $OUT/features.json > $OUT/features.log 2>&1; tail -n 60 $OUT/features.log | cut -c1-200 > $OUT/ftail.txt
timeout 100 python -m bench.traffic --out $OUT/traffic.json > $OUT/traffic.log 2>&1; tail -n 25 $OUT/traffic.log >> $OUT/ftail.txt
