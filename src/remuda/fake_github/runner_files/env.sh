#!/bin/bash
# Like env.sh of actions/runner (src/Misc/layoutroot, 2.336.0): writes `.path`, and appends to `.env` what it lacks.
touch .env
echo "$PATH" >.path
for name in LANG JAVA_HOME ANT_HOME M2_HOME ANDROID_HOME ANDROID_SDK_ROOT GRADLE_HOME NVM_BIN NVM_PATH \
  LD_LIBRARY_PATH PERL5LIB; do
  if [[ -n "${!name}" ]] && ! grep -q "$name=" .env; then
    echo "$name=${!name}" >>.env
  fi
done
