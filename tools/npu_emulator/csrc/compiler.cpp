// Options of operator compilation: accepted, and nothing is ever compiled.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

extern "C" {

aclError aclSetCompileopt(aclCompileOpt, const char *) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 64; }
aclError aclGetCompileopt(aclCompileOpt, char *value, size_t length) {
  if (length > 0) value[0] = '\0';
  return ACL_SUCCESS;
}
aclError aclopSetCompileFlag(aclOpCompileFlag) { return ACL_SUCCESS; }

aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t *value) {
  *value = 0;
  return ACL_SUCCESS;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt, int64_t *value) {
  *value = 0;
  return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }

}  // extern "C"
