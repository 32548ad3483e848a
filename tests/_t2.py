import sys; sys.path.insert(0,"/work/main/tests")
from ranks import run_ranks
import fsdp_models as fm
def work(rank, world):
    def build(): return fm.shard(fm.Net())
    return fm.both(build, fm.train, rank)
if __name__=="__main__":
    for r in run_ranks(work,2): print(r)
