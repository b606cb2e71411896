import torch
from autopar.interface import ProgramInterface, TensorInterface
from autopar.sharding import parse_sharding, REPLICATE, Shard, is_valid
from autopar.runtime.module import take_over
from tests.dist.runtime.work import make_mesh, mlp_executable, full

def interface_of(model, sizes):
    axes=tuple(sizes); 
    names={}
    for n,p in model.named_parameters(remove_duplicate=False): names.setdefault(id(p),[]).append(n)
    P=dict(model.named_parameters(remove_duplicate=False))
    params=[]
    for ns in names.values():
        p=P[ns[0]]
        sh=(Shard(0),)+ (Shard(1),) if p.ndim>1 else (Shard(0),REPLICATE)
        if not is_valid(p.shape, sh, tuple(sizes.values())): sh=(REPLICATE,REPLICATE)
        params.append(TensorInterface(ns[0], tuple(p.shape), str(p.dtype)[6:], sh, True, tuple(ns[1:])))
    bufs=tuple(TensorInterface(n,tuple(b.shape),str(b.dtype)[6:],(REPLICATE,REPLICATE)) for n,b in model.named_buffers())
    return ProgramInterface(axes, tuple(sizes.values()), tuple(params), bufs, (), ())

def work(which, sizes):
    import transformers, time
    from transformers import GPT2Config, LlamaConfig, BertConfig
    cfg,cls={"gpt2":(GPT2Config(n_embd=64,n_layer=2,n_head=4,vocab_size=127,n_positions=64),transformers.GPT2LMHeadModel),
     "llama":(LlamaConfig(hidden_size=64,num_hidden_layers=2,num_attention_heads=8,num_key_value_heads=4,intermediate_size=128,vocab_size=128),transformers.LlamaForCausalLM),
     "bert":(BertConfig(hidden_size=64,num_hidden_layers=2,num_attention_heads=8,intermediate_size=128,vocab_size=128),transformers.BertForMaskedLM)}[which]
    with torch.device("meta"): m=cls(cfg)
    c=take_over(m, make_mesh(sizes), lambda a,k: None, interface_of(m,sizes))
    t=time.time(); c.init_weights(0); t=time.time()-t
    out={n:full(p) for n,p in c.named_parameters()}
    out.update({"B:"+n:b for n,b in c.named_buffers()})
    return out,t, list(c.state_dict().keys())
